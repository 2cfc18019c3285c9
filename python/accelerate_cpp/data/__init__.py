"""How batches are distributed to processes: arithmetic and samplers that need neither a session nor a process group."""

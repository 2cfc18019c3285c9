"""Training of models of transformers as the engine of Megatron-LM does, on the mesh of this package."""

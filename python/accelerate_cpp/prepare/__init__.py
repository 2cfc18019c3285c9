"""The steps of ``prepare``, in order, and the state of prepared objects."""

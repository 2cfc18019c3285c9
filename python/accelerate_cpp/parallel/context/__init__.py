"""Context parallelism: attention over sequences whose tokens are split over the processes of a group.

:class:`~accelerate_cpp.parallel.context.context.ContextParallel` is what others use. Below it: which tokens a process
has (``sequences``), attention between the tokens of all processes (``attention``), which brings keys and values to the
queries (``split_attention``, ``transports``, ``blocks``) or gives each process all tokens of some heads (``ulysses``),
and how models get to call it (``interception``).
"""

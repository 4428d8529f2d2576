"""Per task: what it must compute (specification, PyTorch reference, inputs) and the expert kernel."""

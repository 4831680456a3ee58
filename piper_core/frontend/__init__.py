"""From a PyTorch model to chunks: annotations, capture, cut, costs, execution."""

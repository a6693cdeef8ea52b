"""State to tensors to byte extents and back, and the plan by which tensors are cut."""

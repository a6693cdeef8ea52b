"""Releases: publish the weights of a training to inference processes, and follow them."""

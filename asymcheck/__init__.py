"""asymcheck: a tiered, content-addressed checkpoint store for training in PyTorch."""

import lazy_loader

# Each name is imported when it is asked for (PEP 562): torch takes seconds, and the command line and the process that
# pushes need none of it. The names are in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

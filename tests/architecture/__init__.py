"""Rules about the source itself: who may import whom, how large a module gets, where errors come from."""

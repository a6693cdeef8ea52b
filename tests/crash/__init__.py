"""Stores that are killed, cut from power, filled up, shared and lied to, and what must be left of them."""

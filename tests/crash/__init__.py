"""Stores after kills, power loss, full disks, sharing and read errors."""

"""Tests of stores after kills, power loss, full disks, concurrent use and read errors."""

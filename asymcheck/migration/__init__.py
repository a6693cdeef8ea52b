"""Migration: checkpoints moved between a store on a local drive and remote locations, up one and down the other."""

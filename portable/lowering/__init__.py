"""ATen → StableHLO: one rule an overload (registry), one interpreter (program), one file a family of ops."""

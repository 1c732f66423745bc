"""From masters to notebooks."""

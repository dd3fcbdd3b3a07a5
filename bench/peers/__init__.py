"""Programs that run other engines, each in an environment of its own."""

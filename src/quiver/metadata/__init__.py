"""The managers' replicated metadata: commands, what they do, and where the outcome is kept."""

"""Stand-ins for checkpoints that bring their own code, with the published signatures of that code."""

"""What an objective does, as tables and figures."""

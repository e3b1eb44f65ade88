"""The scoreboard: what must hold, measured on the machine at hand. `deftune selftest` runs the small sizes."""

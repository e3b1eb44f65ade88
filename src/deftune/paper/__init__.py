"""The paper: its theory, recipes, regimes, printed tables, claims and figures. No other room needs this one."""

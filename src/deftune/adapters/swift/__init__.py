"""ms-swift with an objective: ``swift sft --external_plugins $(python -m deftune.adapters.swift) --loss_type deft``.

The plugin has a folder of its own because ms-swift puts a plugin's folder first in ``sys.path``.
"""

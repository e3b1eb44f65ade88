"""Print the path of the plugin, for ``--external_plugins``."""

from pathlib import Path

print(Path(__file__).with_name("deft_plugin.py"))

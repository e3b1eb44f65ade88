"""Other training stacks: one small file each."""

"""Files for packagers and operators: the systemd unit `quiver.service`, and completion scripts of shells.

`quiver completion SHELL` prints the same scripts; a test holds them equal.
"""

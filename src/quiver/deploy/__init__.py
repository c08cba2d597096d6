"""Files for packagers and operators: images, charts, units, alert rules, dashboards, and completion scripts of shells.

Most are links into `deploy/` at the root of the sources, where people look for them; in the wheel they are files.
`quiver deploy` lists, prints and copies them. `quiver completion SHELL` prints the same scripts; a test holds them
equal.
"""

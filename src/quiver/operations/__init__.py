"""An operator's work on a whole cluster: recovery after the loss of a majority, backup and restore.

`survivors` reads what stopped nodes have, `recover` decides and writes what is forced on them. `backup` and `restore`
copy topics between a running cluster and a folder.
"""

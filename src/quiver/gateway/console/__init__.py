"""The web console of a gateway: its files, the numbers that it draws, and the one stream that keeps pages current.

`assets` serves the files, which are part of the package. `meter` turns a node's metrics into the numbers of charts, and
`recorder` keeps those of the last minutes, with what changed in the metadata. `overview` puts the reports of all nodes
together, `health` says in a sentence how the cluster is, and `feed` sends both to all open consoles, computed at most
once a second however many there are.
"""

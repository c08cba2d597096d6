"""Consumer groups: the pure part, below everything that stores or serves them.

A group is a registered consumer (`quiver.model.ConsumerId`); its members share the topics that it reads. `assignment`
computes who should own which partition, `machine` the next steps towards it, `settings` how a group reads its topics as
a work queue.
"""

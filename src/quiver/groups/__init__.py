"""Consumer groups: the pure part, below everything that stores or serves them.

A group is a registered consumer (`quiver.model.ConsumerId`); its members share the topics that it reads.
"""

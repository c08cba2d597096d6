"""What managers do for the cluster: place replicas, watch who lives, and bring what is to what is meant to be.

`placement` decides where things go and is pure.
"""

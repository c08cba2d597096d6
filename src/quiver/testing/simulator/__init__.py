"""One simulator with two models: consensus groups (`quiver.testing.groups`) and clusters (`quiver.testing.clusters`).

`runner` turns a seed into a report: it draws the knobs, builds the world, lets the nemesis inject a schedule of faults,
heals the world and runs the model's checks. A model supplies its knobs, its world, its load and its checks; the
machines, the fault kinds, the report, the campaign over many seeds and the shrinking of schedules are shared.
"""

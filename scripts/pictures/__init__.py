"""The pictures of the documentation: `make pictures` draws them into docs/images.

svg             shapes and colors, for light and dark
recorded_job    real jobs on this machine, shown in pictures
architecture, step_timeline, killed_worker, terminal    one picture each
"""

"""Reading a run's folder: figures, pages and tables.

Nothing here needs the run, its data or its method.
"""

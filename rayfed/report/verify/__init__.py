"""Whether a run's folder, or a published record of a run, is what its job gives; some rounds are
played again.
"""

"""The ground: errors, checked values, seeds, isolation of hooks, files, a note for the parent
process.
"""

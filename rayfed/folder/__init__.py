"""The folder of a run: everything that a run leaves on disk, and how it is read back.

runs/<name>/  job.toml  environment.json  partition.parquet  rounds.parquet  clients.parquet
              classes.parquet
              checkpoints/  summary.json  log.txt  report.html
"""

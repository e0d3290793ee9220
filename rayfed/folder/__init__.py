"""The folder of a run: what a run leaves on disk, and the functions that read it.

runs/<name>/  job.toml  environment.json  partition.parquet  rounds.parquet  clients.parquet
              classes.parquet
              checkpoints/  summary.json  log.txt  report.html
"""

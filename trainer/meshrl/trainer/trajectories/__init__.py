"""The rows that a run trained and evaluated, kept as Parquet files: what is written, and how it is found again."""

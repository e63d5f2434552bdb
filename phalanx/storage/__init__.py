"""What a job keeps, wherever that is: in a file system, or in a store that `fsspec` knows (`s3://`, `gs://`, `hf://`)."""

"""Files of a job, in a file system or in an object store supported by `fsspec` (`s3://`, `gs://`, `hf://`)."""

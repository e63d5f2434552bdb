"""Why a job failed: the task that was the cause, and the page that says so."""

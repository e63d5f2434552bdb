"""Starts, supervises and ends the processes of a job. Runs in the launcher; `runtime` is what runs inside workers.

    job_runner, launch_function, local_replicas    a job from the command line, from Python, of MirroredStrategy
    job_request, worker_placement                   what runs where; worker_environment: environment variables
    job_supervisor                                  the event loop of a job, and its decisions:
        shutdown, task_table, exit_handler            states of the job and its tasks, and the effect of an exit
        restart_policy, root_cause                    which tasks are restarted; which task was the cause
    hosts/                                          hosts of workers: this host, or another one through ssh
    host_slots, host_discovery                      lists of hosts; a script that prints them
    host_pool, slot_assignment, host_blacklist      the hosts of an elastic job
    elastic_supervisor                              the coordinator of an elastic job
    job_reporter, failure_report                    output for the user
    watched_job                                     observation and control of a job by other processes:
        job_recorder, job_control, job_registry       its events, its socket, the registry of running jobs
        job_connection, job_follower                  the other end, in another process
        status_report, top_view                       `phalanx status`, `scale` and `top`

Nothing is imported here, so that each entry point pays only for its own imports.
"""

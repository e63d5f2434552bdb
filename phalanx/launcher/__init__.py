"""Starts, supervises and ends the processes of a job. Runs in the launcher; what runs inside workers is `runtime`.

    job_runner, launch_function, local_replicas    a job from the command line, from Python, of MirroredStrategy
    job_request, worker_placement                   what runs where; worker_environment: with which variables
    job_supervisor                                  the loop over a job's life, and its decisions:
        shutdown, task_table, exit_handler            states of the job and its tasks, and what an exit changes
        restart_policy, root_cause                    which tasks are restarted; which task was the cause
    hosts/                                          where workers run: this host, another one through ssh
    host_slots, host_discovery                      which hosts there are; a script that prints them
    host_pool, slot_assignment, host_blacklist      the hosts of an elastic job
    elastic_supervisor                              its coordinator
    job_reporter, failure_report                    what the user is shown
    watched_job                                     what others see of a job, and can ask of it:
        job_recorder, job_control, job_registry       its events, its socket, the list of running jobs
        job_connection, job_follower                  the other end, in another process
        status_report, top_view                       `phalanx status`, `scale` and `top`

Nothing is imported here: each entry point pays for its own imports only.
"""

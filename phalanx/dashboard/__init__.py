"""The view of a job in a browser: the dashboard while it runs, the report after it has ended.

dashboard_server                  the process that serves the page
dashboard_app, access             its endpoints, and who may use them
job_hub                           follows the jobs of this user
prometheus_metrics                the same figures for Prometheus
report                            the page as a single file
page, browser_view, assets/       the page itself, and the data that it receives about a job
"""

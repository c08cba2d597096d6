"""Pipelines: jobs on Spark that move, check and sum up what topics hold. `quiver pipeline NAME` runs them.

A job is a frozen struct of its options with one method, `run`. `jobs` knows all of them by name and makes them from
flags or from a job file; `running` gives them a session, tells how far they are and ends them in good order. Each job
keeps its place where its result is, so that whoever starts it again goes on there, after a crash as after a stop.
"""

from __future__ import annotations

from quiver.spark.pipelines.job import JOBS, Job, JobProgress, JobResult, JobRun, job_from_file, make_job
from quiver.spark.pipelines.runner import execute

__all__ = ["JOBS", "Job", "JobProgress", "JobResult", "JobRun", "execute", "job_from_file", "make_job"]

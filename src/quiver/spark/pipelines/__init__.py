"""Pipelines: Spark jobs that ingest, archive, audit, analyze and replay topics. `quiver pipeline NAME` runs them.

A job is a frozen struct of its options with one method, `run`. `job` creates jobs from flags or job files, gives
them a Spark session, reports progress and handles signals. Each job commits its offsets atomically with its output, so
a job that is started again resumes exactly there, after a crash as after a stop.
"""

from __future__ import annotations

from quiver.spark.pipelines.job import JOBS, Job, JobProgress, JobResult, JobRun, execute, job_from_file, make_job

__all__ = ["JOBS", "Job", "JobProgress", "JobResult", "JobRun", "execute", "job_from_file", "make_job"]

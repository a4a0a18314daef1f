"""Runs migrations on the connection that `Database.migrate` hands over."""

from __future__ import annotations

from alembic import context

from chorister.aggregator.storage.schema import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=connection.dialect.name == "sqlite",
)
with context.begin_transaction():
    context.run_migrations()

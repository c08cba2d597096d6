-- A database of schema version 1 as its program left it. Never changed: migrations are tested on it.
BEGIN TRANSACTION;
CREATE TABLE brokers (
        broker_id BIGINT NOT NULL PRIMARY KEY,
        identity TEXT NOT NULL,
        wire_address TEXT NOT NULL,
        http_address TEXT NOT NULL,
        rack TEXT NOT NULL,
        state TEXT NOT NULL,
        is_draining BOOLEAN NOT NULL,
        registered_ms BIGINT NOT NULL,
        changed_ms BIGINT NOT NULL
    );
INSERT INTO "brokers" VALUES(1,'identity-1','host1:9002','','','alive',0,1000,1000);
INSERT INTO "brokers" VALUES(2,'identity-2','host2:9002','','','alive',0,1000,1000);
CREATE TABLE consumers (
        consumer_id BIGINT NOT NULL PRIMARY KEY,
        registered_ms BIGINT NOT NULL,
        request_id TEXT NOT NULL
    );
INSERT INTO "consumers" VALUES(1,1000,'');
CREATE TABLE heartbeats (
        kind TEXT NOT NULL,
        id BIGINT NOT NULL,
        last_seen_ms BIGINT NOT NULL,
        PRIMARY KEY (kind, id)
    );
INSERT INTO "heartbeats" VALUES('broker',1,2000);
INSERT INTO "heartbeats" VALUES('broker',2,2000);
INSERT INTO "heartbeats" VALUES('producer',1,2000);
INSERT INTO "heartbeats" VALUES('consumer',1,2000);
CREATE TABLE meta (
        singleton INTEGER NOT NULL PRIMARY KEY,
        schema_version INTEGER NOT NULL,
        applied_index BIGINT NOT NULL,
        applied_term BIGINT NOT NULL,
        cluster_id TEXT NOT NULL,
        formed_ms BIGINT NOT NULL,
        next_topic_id BIGINT NOT NULL,
        next_group_id BIGINT NOT NULL,
        next_producer_id BIGINT NOT NULL,
        next_consumer_id BIGINT NOT NULL,
        next_move_id BIGINT NOT NULL
    );
INSERT INTO "meta" VALUES(1,1,12,3,'c1',1000,2,4,2,2,1);
CREATE TABLE moves (
        move_id BIGINT NOT NULL PRIMARY KEY,
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        source BIGINT,
        target BIGINT NOT NULL,
        state TEXT NOT NULL,
        begun_ms BIGINT NOT NULL,
        changed_ms BIGINT NOT NULL
    );
CREATE TABLE partitions (
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        group_id BIGINT NOT NULL,
        leader BIGINT,
        epoch BIGINT NOT NULL,
        PRIMARY KEY (topic_id, partition_id)
    );
INSERT INTO "partitions" VALUES(1,0,2,2,1);
INSERT INTO "partitions" VALUES(1,1,3,1,1);
CREATE TABLE producers (
        producer_id BIGINT NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        epoch BIGINT NOT NULL,
        registered_ms BIGINT NOT NULL
    );
INSERT INTO "producers" VALUES(1,'p',0,1000);
CREATE TABLE registrations (
        kind TEXT NOT NULL,
        client_id BIGINT NOT NULL,
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        start TEXT,
        PRIMARY KEY (kind, client_id, topic_id, partition_id)
    );
INSERT INTO "registrations" VALUES('producer',1,1,-1,NULL);
INSERT INTO "registrations" VALUES('consumer',1,1,0,'latest');
CREATE TABLE replicas (
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        broker_id BIGINT NOT NULL,
        role TEXT NOT NULL,
        position BIGINT NOT NULL,
        PRIMARY KEY (topic_id, partition_id, broker_id)
    );
INSERT INTO "replicas" VALUES(1,0,2,'voter',0);
INSERT INTO "replicas" VALUES(1,0,1,'voter',1);
INSERT INTO "replicas" VALUES(1,1,1,'voter',0);
INSERT INTO "replicas" VALUES(1,1,2,'voter',1);
CREATE TABLE topics (
        topic_id BIGINT NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        partitions BIGINT NOT NULL,
        replicas BIGINT NOT NULL,
        retention_ms BIGINT,
        retention_bytes BIGINT,
        until_consumed BOOLEAN NOT NULL,
        state TEXT NOT NULL,
        created_ms BIGINT NOT NULL,
        purge_ms BIGINT,
        request_id TEXT NOT NULL
    );
INSERT INTO "topics" VALUES(1,'logs',2,2,NULL,NULL,0,'active',1000,NULL,'');
COMMIT;

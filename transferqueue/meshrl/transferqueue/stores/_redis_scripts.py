"""The scripts that the redis store runs inside Redis: each is one atomic step that first checks the fencing token.

    head      hash: format, owner, generation (fencing token), name, sequence (number of the last commit)
    meta      hash: the table META
    payload   hash: the table PAYLOAD
    staged:*  lists: puts of a commit that is too big for one command, until the commit takes them in

A script runs completely or not at all, in memory and in the append-only file alike. It may exceed `maxmemory`
(allow-oom): rows must be able to leave when Redis is full; calls that let rows in ask `check_room` first.
"""

from __future__ import annotations

from typing import Final

CLAIM: Final = """#!lua flags=allow-oom
-- KEYS head meta payload staged:meta staged:payload; ARGV format owner name generation channels
local head = redis.call('HMGET', KEYS[1], 'format', 'owner', 'generation', 'name', 'sequence')
if not head[1] then
  if redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[3]) > 0 then return {'foreign'} end
  if ARGV[4] ~= '0' then return {'empty'} end
  head = {ARGV[1], '', '0', '', '0'}
end
if head[1] ~= ARGV[1] then return {'format', head[1]} end
local generation, ours = tonumber(head[3]), tonumber(ARGV[4])
if head[2] ~= ARGV[2] then
  if ours > 0 and generation >= ours then return {'fenced', head[4]} end
  if head[2] ~= '' and redis.call('PUBSUB', 'NUMSUB', ARGV[5] .. head[2])[2] > 0 then
    return {'owned', head[4]}
  end
end
generation = string.format('%d', math.max(generation, ours) + 1)
redis.call('HSET', KEYS[1], 'format', head[1], 'owner', ARGV[2], 'generation', generation,
  'name', ARGV[3], 'sequence', head[5])
redis.call('DEL', KEYS[4], KEYS[5])
return {'ok', generation, head[5]}
"""
"""Become the owner: `ok` with generation and sequence, or the reason. An owner subscribes to `channels` + owner."""

_FENCE: Final = """
local head = redis.call('HMGET', KEYS[1], 'owner', 'generation', 'sequence', 'name')
if head[1] ~= ARGV[1] or head[2] ~= ARGV[2] then
  return {'lost', head[2] or '0', head[3] or '0', head[4] or ''}
end
if tonumber(head[3]) == tonumber(ARGV[3]) then return {'done'} end
if tonumber(head[3]) ~= tonumber(ARGV[3]) - 1 then return {'lost', head[2], head[3], head[4]} end
"""
"""ARGV owner generation sequence. `done`: this commit arrived before, and its answer was lost on the way."""

STAGE: Final = f"""#!lua flags=allow-oom
-- KEYS head staged:*; ARGV owner generation sequence length key value ...
{_FENCE}
local length = redis.call('LLEN', KEYS[2])
if length == tonumber(ARGV[4]) + #ARGV - 4 then return {{'ok'}} end
if length ~= tonumber(ARGV[4]) then return {{'unstaged'}} end
for at = 5, #ARGV, 1000 do
  redis.call('RPUSH', KEYS[2], unpack(ARGV, at, math.min(at + 999, #ARGV)))
end
return {{'ok'}}
"""
"""Stage puts of one table for the commit `sequence`; `length` is how many strings are staged already."""

COMMIT: Final = f"""#!lua flags=allow-oom
-- KEYS head meta payload staged:meta staged:payload
-- ARGV owner generation sequence staged-meta staged-payload puts-meta puts-payload deletes-meta, then the items:
-- keys and values put into META, then PAYLOAD, keys deleted from META, then PAYLOAD
{_FENCE}
for table = 0, 1 do
  if redis.call('LLEN', KEYS[4 + table]) ~= tonumber(ARGV[4 + table]) then return {{'unstaged'}} end
end
local function each(command, key, first, last)
  for at = first, last, 1000 do
    redis.call(command, key, unpack(ARGV, at, math.min(at + 999, last)))
  end
end
for table = 0, 1 do
  for at = 0, tonumber(ARGV[4 + table]) - 1, 1000 do
    local part = redis.call('LRANGE', KEYS[4 + table], at, at + 999)
    redis.call('HSET', KEYS[2 + table], unpack(part))
  end
  redis.call('DEL', KEYS[4 + table])
end
local payload = 9 + tonumber(ARGV[6])
local gone = payload + tonumber(ARGV[7])
local gone_payload = gone + tonumber(ARGV[8])
each('HSET', KEYS[2], 9, payload - 1)
each('HSET', KEYS[3], payload, gone - 1)
each('HDEL', KEYS[2], gone, gone_payload - 1)
each('HDEL', KEYS[3], gone_payload, #ARGV)
redis.call('HSET', KEYS[1], 'sequence', ARGV[3])
return {{'done'}}
"""
"""Commit everything of one `apply`, and its number."""

RELEASE: Final = """#!lua flags=allow-oom
-- KEYS head; ARGV owner generation
local head = redis.call('HMGET', KEYS[1], 'owner', 'generation')
if head[1] == ARGV[1] and head[2] == ARGV[2] then redis.call('HSET', KEYS[1], 'owner', '') end
return {'ok'}
"""
"""Stop owning the store, if this process still owns it."""

"""The three atomic steps on the registry, as Lua. A replica's key is a hash: epoch, record."""

RENEW = """
local held = redis.call('HGET', KEYS[1], 'epoch')
if held and held > ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'record', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('SADD', KEYS[2], ARGV[4])
return 1
"""
"""KEYS: replica, index. ARGV: epoch, record, ttl in ms, id. 0: a later life holds the id."""

WITHDRAW = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[2])
return 1
"""
"""KEYS: replica, index. ARGV: epoch, id. 0: the record is not this life's."""

MEMBERS = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local record = redis.call('HGET', ARGV[1] .. id, 'record')
  if record then found[#found + 1] = record else redis.call('SREM', KEYS[1], id) end
end
return found
"""
"""KEYS: index. ARGV: key prefix. Every live record; ids whose record expired are forgotten."""

"""Scripts that Redis runs in one piece."""

from __future__ import annotations

__all__ = ["COMMIT", "TAKE_FENCE", "TAKE_GROUP"]

TAKE_FENCE = """
-- KEYS: fence, owner. ARGV: generation, token. Answers 0, or the generation that holds it.
local held = tonumber(redis.call('GET', KEYS[1]) or '0')
local wanted = tonumber(ARGV[1])
if held == wanted and redis.call('HGET', KEYS[2], 'token') == ARGV[2] then return 0 end
if held >= wanted then return held end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], 'token', ARGV[2], 'generation', ARGV[1],
           'since', redis.call('TIME')[1])
return 0
"""

TAKE_GROUP = """
-- KEYS: fence of a group. ARGV: generation. The model's fence was taken before.
local held = tonumber(redis.call('GET', KEYS[1]) or '0')
if held > tonumber(ARGV[1]) then return held end
if held < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
return 0
"""

COMMIT = """
-- KEYS: fence, head, log, parts.
-- ARGV: 1 our generation; the new head's 2 version, 3 checksum, 4 generation, 5 epoch; 6 since, or
-- empty: a snapshot; the expected head's 7 version (empty: none), 8 checksum, 9 generation,
-- 10 epoch; 11 payload chunks; 12 floats of dense weights, or empty; 13 number of words of the
-- stream entry; these words; then the words of the head.
local fence = redis.call('GET', KEYS[1])
if fence ~= ARGV[1] then return {'fence', fence or ''} end
local at = redis.call('HMGET', KEYS[2], 'version', 'checksum', 'generation', 'epoch')
if at[1] == ARGV[2] and at[2] == ARGV[3] and at[3] == ARGV[4] then return {'already'} end
local fits
if ARGV[6] ~= '' then
  fits = at[1] and at[4] == ARGV[5] and tonumber(ARGV[6]) <= tonumber(at[1])
elseif ARGV[7] == '' then
  fits = not at[1]
else
  fits = at[1] == ARGV[7] and at[2] == ARGV[8] and at[3] == ARGV[9] and at[4] == ARGV[10]
end
if not fits or (at[1] and tonumber(at[1]) >= tonumber(ARGV[2])) then
  return {'head', at[1] or ''}
end
local payload, dense = 'd:' .. ARGV[2], 'dense:' .. ARGV[2]
if ARGV[6] ~= '' then
  local found = redis.call('HGET', KEYS[4], payload) or ''
  if string.match(found, '^%d+') ~= ARGV[11] then return {'parts', payload} end
end
if ARGV[12] ~= '' then
  local found = redis.call('HGET', KEYS[4], dense) or ''
  if string.match(found, '^%d+') ~= ARGV[12] then return {'parts', dense} end
end
-- Nothing was written up to here; a script that fails at its first write has written nothing.
if not at[1] then redis.call('DEL', KEYS[3]) end
local words = tonumber(ARGV[13])
local entry = {'XADD', KEYS[3], ARGV[2] .. '-0', unpack(ARGV, 14, 13 + words)}
local added = redis.pcall(unpack(entry))
if type(added) == 'table' and added.err then
  if not string.find(added.err, 'equal or smaller') then return added end
  -- A stream ahead of its head is of a time that is gone: followers find a gap and begin anew.
  redis.call('DEL', KEYS[3])
  redis.call(unpack(entry))
end
redis.call('DEL', KEYS[2])
redis.call('HSET', KEYS[2], unpack(ARGV, 14 + words))
for _, field in ipairs({payload, dense}) do
  local found = redis.call('HGET', KEYS[4], field)
  if found then redis.call('HSET', KEYS[4], field, (string.gsub(found, '%d+$', '1'))) end
end
return {'published'}
"""

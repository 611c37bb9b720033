-- One token, 1,000 channels in turn; a machine-readable last line.
local token = os.getenv("TOKEN")
local requests, at = {}, 0

function init()
  local headers = { ["Authorization"] = "Bot " .. token, ["User-Agent"] = "DiscordBot (https://example.test, 1.0)" }
  for i = 0, 999 do
    local path = string.format("/api/v10/channels/%d/messages?limit=1", 100000000000000000 + i)
    requests[i] = wrk.format("GET", path, headers)
  end
end

function request()
  at = (at + 1) % 1000
  return requests[at]
end

function done(summary)
  local e = summary.errors
  print(string.format("result %d %d %d", summary.requests, e.connect + e.read + e.write + e.status + e.timeout, summary.duration))
end

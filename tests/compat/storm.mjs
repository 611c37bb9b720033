// One of several processes of a bot: 100 messages at once, each to a channel of its own, then 4 to a channel all share.
import { REST } from '@discordjs/rest';
import { Routes } from 'discord.js';

const { NIRN_API, NIRN_TOKEN, NIRN_PROCESS } = process.env;
const rest = new REST({ version: '10', api: NIRN_API, timeout: 65_000 }).setToken(NIRN_TOKEN);
const send = (channel, content) => rest.post(Routes.channelMessages(channel), { body: { content } });

// Until all of the bot's processes have started.
console.log('ready');
await new Promise((go) => process.stdin.on('end', go).resume());

const own = Array.from({ length: 100 }, (_, index) => `${210_000_000_000_000_000n + BigInt(NIRN_PROCESS) * 1000n + BigInt(index)}`);
await Promise.all(own.map((channel) => send(channel, 'to my own')));
await Promise.all(Array.from({ length: 4 }, () => send('220000000000000000', 'to all of us')));
console.log('sent');

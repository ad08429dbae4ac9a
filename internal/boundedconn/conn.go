// Package boundedconn gives a network connection a time limit for every single read and write.
//
// Neither of our client libraries can be interrupted while the kernel holds it in a read or a
// write: amqp091-go ignores its context once a publish has begun, and lib/pq waits for the
// server's answer even after a query was cancelled. The limit must therefore sit below them.
package boundedconn

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// corkBytes is how much a corked connection gathers before it writes: large enough for a
// hundred small messages in one system call, small enough to stay in the CPU's cache.
const corkBytes = 64 << 10

// Conn is a net.Conn whose reads and writes end in time. A read or write that misses its limit
// breaks the connection for good: the owner throws it away.
//
// Corked, it gathers writes and sends them in few large ones; an error of the gathered bytes is
// then reported by a later Write or by Uncork. Safe for concurrent use, like any net.Conn.
type Conn struct {
	net.Conn
	writeTimeout time.Duration
	readTimeout  atomic.Int64 // nanoseconds; 0: reads are limited by the outer deadlines alone
	patient      atomic.Bool  // a write that misses its limit is continued

	readDeadline  atomic.Int64 // set from outside, in Unix nanoseconds; 0 for none
	writeDeadline atomic.Int64
	ownReads      atomic.Bool // outer read deadlines are ignored

	mu     sync.Mutex // guards corked and buf, and keeps writes whole
	corked bool
	buf    []byte
}

// New bounds conn. A zero readTimeout leaves reads to the deadlines that the library sets.
func New(conn net.Conn, readTimeout, writeTimeout time.Duration) *Conn {
	c := &Conn{Conn: conn, writeTimeout: writeTimeout}
	c.readTimeout.Store(int64(readTimeout))
	return c
}

// OwnReads makes timeout the limit of every read from now on and ignores read deadlines set from
// outside: those of a library that forgets to extend them while it is held in a write.
func (c *Conn) OwnReads(timeout time.Duration) error {
	c.ownReads.Store(true)
	c.readDeadline.Store(0)
	c.readTimeout.Store(int64(timeout))
	return c.Conn.SetReadDeadline(time.Now().Add(timeout))
}

// SetPatient makes writes wait as long as it takes, for a peer that said it will not read for
// now; closing the connection still ends them. A write under way changes at its next timeout.
func (c *Conn) SetPatient(patient bool) { c.patient.Store(patient) }

// Read reads under the read timeout or the deadline set from outside, whichever ends first.
func (c *Conn) Read(p []byte) (int, error) {
	if timeout := time.Duration(c.readTimeout.Load()); timeout > 0 {
		if err := c.Conn.SetReadDeadline(earlier(timeout, c.readDeadline.Load())); err != nil {
			return 0, err
		}
	}
	return c.Conn.Read(p)
}

// Write writes p, or gathers it while the connection is corked.
func (c *Conn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.corked {
		return c.write(p)
	}
	if len(c.buf)+len(p) > corkBytes {
		if err := c.flush(); err != nil {
			return 0, err
		}
		if len(p) >= corkBytes {
			return c.write(p)
		}
	}
	c.buf = append(c.buf, p...)
	return len(p), nil
}

// Cork makes writes gather until Uncork.
func (c *Conn) Cork() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.corked = true
}

// Uncork sends what was gathered and lets writes through again.
func (c *Conn) Uncork() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.corked = false
	return c.flush()
}

// flush and write run under mu.
func (c *Conn) flush() error {
	if len(c.buf) == 0 {
		return nil
	}
	_, err := c.write(c.buf)
	c.buf = c.buf[:0]
	return err
}

func (c *Conn) write(p []byte) (int, error) {
	written := 0
	for {
		if err := c.Conn.SetWriteDeadline(earlier(c.writeTimeout, c.writeDeadline.Load())); err != nil {
			return written, err
		}
		n, err := c.Conn.Write(p[written:])
		written += n
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) || !c.patient.Load() {
			return written, err
		}
	}
}

// SetDeadline, SetReadDeadline and SetWriteDeadline set a limit that ends a read or write earlier
// than the connection's own timeouts would, and never later.
func (c *Conn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// SetReadDeadline is described at SetDeadline.
func (c *Conn) SetReadDeadline(t time.Time) error {
	if c.ownReads.Load() {
		return nil
	}
	c.readDeadline.Store(nanos(t))
	return c.Conn.SetReadDeadline(t)
}

// SetWriteDeadline is described at SetDeadline.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.writeDeadline.Store(nanos(t))
	return c.Conn.SetWriteDeadline(t)
}

// nanos is t in Unix nanoseconds, 0 for the zero time.
func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func earlier(timeout time.Duration, deadline int64) time.Time {
	t := time.Now().Add(timeout)
	if deadline != 0 && deadline < t.UnixNano() {
		return time.Unix(0, deadline)
	}
	return t
}

// KeepAlive finds a vanished peer within about ten seconds.
var KeepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3}

// Dialer dials bounded TCP or Unix connections with keepalives. It has the methods that lib/pq
// looks for. Its zero value has no timeouts and is not useful.
type Dialer struct {
	ConnectTimeout time.Duration
	ReadTimeout    time.Duration // see New
	WriteTimeout   time.Duration
}

// Dial dials within ConnectTimeout.
func (d Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

// DialTimeout dials within timeout, and within ConnectTimeout.
func (d Dialer) DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return d.DialContext(ctx, network, address)
}

// DialContext dials until ctx is done, ConnectTimeout at most.
func (d Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	nd := net.Dialer{Timeout: d.ConnectTimeout, KeepAliveConfig: KeepAlive}
	conn, err := nd.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return New(conn, d.ReadTimeout, d.WriteTimeout), nil
}

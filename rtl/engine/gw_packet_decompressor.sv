// For packets that arrive: the reverse of gw_packet_compressor.
module gw_packet_decompressor #(
    parameter logic [7:0] TAG = 8'h28  // type of service in the IPv4 header
) (
    input logic clk,
    input logic rst,

    input  logic [255:0] s_axis_tdata,
    input  logic [ 31:0] s_axis_tkeep,
    input  logic         s_axis_tlast,
    input  logic         s_axis_tvalid,
    output logic         s_axis_tready,
    output logic [255:0] m_axis_tdata,
    output logic [ 31:0] m_axis_tkeep,
    output logic         m_axis_tlast,
    output logic [  3:0] m_axis_tuser,
    output logic         m_axis_tvalid,
    input  logic         m_axis_tready
);
    wire [271:0] bytes;
    wire [5:0] available, step_raw_size, take;
    wire [3:0] step_present;
    wire ended, step_raw, step_last, step_padding, taken, finished;
    gw_packet_steps #(.TAG(TAG)) steps (.*);
    wire unused_user;
    gw_decompression_engine engine (
        .s_axis_tuser(1'b0),
        .user(unused_user),
        .*
    );
endmodule
